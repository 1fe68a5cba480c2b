"""Curves with as many points as a picture needs, in the terminal and as PNG or SVG."""
