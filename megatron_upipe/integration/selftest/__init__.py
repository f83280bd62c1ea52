"""``megatron-upipe selftest``: does UPipe compute the stock result on this machine, before hours are burnt?

``parity`` compares stock and UPipe modules, ``shapes`` chooses what to compare, ``bandwidth`` measures exchange and
ring, ``report`` runs it all on one rank of a group and prints, ``launch`` starts the ranks.
"""
