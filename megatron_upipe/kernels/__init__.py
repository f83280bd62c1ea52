"""Block attention: one file per backend behind one protocol (``protocol.py``), chosen by ``select.py``."""
