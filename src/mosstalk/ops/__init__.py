"""Fused steps of the codec, each a Triton kernel with its plain-torch reference beside it.

A kernel runs where its tensors are on a GPU and Triton is installed, the reference elsewhere;
``launch.references_only`` turns kernels off. Shapes: R rows, C, K or N channels, H heads, d
channels of a head, T or F rows of an item, P rows of a page.
"""
