"""``afl theory``: what the theorems say of a run before it is made."""
