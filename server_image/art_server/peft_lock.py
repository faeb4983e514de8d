"""One thread at a time may add an adapter through PEFT, whatever model it is added to.

To do it without drawing first weights, PEFT replaces `nn.Module.register_parameter` of the whole
process for that time: parameters that another thread registers meanwhile lose their values. Trainer
and engine add adapters in threads of their own.
"""

from threading import Lock

ADDING = Lock()
