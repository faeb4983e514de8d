"""How a call becomes a step: journal, queue, programs, publishing."""
