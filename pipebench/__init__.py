"""pipebench: which way of parallelising training reaches the target accuracy first, and what does it cost?"""

__version__ = "0.2.0"
