"""How rollouts are scored, and what judges and generators are asked."""
