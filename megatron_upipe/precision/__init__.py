"""How a layer's matrix products are computed: in the parameters' own precision, or in FP8."""
