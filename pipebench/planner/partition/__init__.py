"""Graphs cut in parts: Kernighan-Lin, and vPipe's Algorithm 3, which coarsens the graph first."""
