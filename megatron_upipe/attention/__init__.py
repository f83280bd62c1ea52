"""UPipe attention: head schedule, forward and backward by stages, and the Megatron module.

Only ``module`` imports Megatron; the letters are those of ``megatron_upipe.context``.
"""
