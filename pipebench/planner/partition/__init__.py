"""Graphs cut in parts: vPipe's Algorithm 3 for consecutive layers, which coarsens the graph first."""
