"""CUDA sources, compiled at run time by fp4kit.backends.cuda_module."""
