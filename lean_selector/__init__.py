"""lean-selector: which inference worker should serve this prompt?"""

__version__ = "0.1.0"
