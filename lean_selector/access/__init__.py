"""Who may come in: roles, the tokens that have them, and what is said to others."""
