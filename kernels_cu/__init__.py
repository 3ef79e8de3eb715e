"""CUDA sources, compiled at run time by fp4kit.cuda.compile."""
