"""Layers that move between stages: asked for or decided (vPipe), while training goes on or at drains."""
