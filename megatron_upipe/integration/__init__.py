"""Everything that touches Megatron-LM from outside.

``symbols`` is the registry of replaced Megatron symbols, ``versions`` the range of Megatron-LM that they were read in,
``startup`` the neutralised start-up steps, ``flags`` the plug-in's flags, ``launcher`` and ``gpt_entry`` what runs,
``cpu`` the stand-in that lets Megatron train without a GPU.
"""
