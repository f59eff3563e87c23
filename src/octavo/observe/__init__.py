"""Count and trace what happened, and never change it."""
