"""Fused steps of the language model and the codec: Triton kernels and their plain-torch references.

A kernel runs where its tensors are on a GPU and Triton is installed, the reference elsewhere;
``launch.references_only`` turns kernels off. Shapes: R rows, C, K or N channels, H heads, d
channels of a head, T or F rows of an item, P rows of a page.
"""
