"""How mosstalk-pocket was made: one module per stage, run as ``python -m recipes.pocket``."""
