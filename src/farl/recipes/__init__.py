"""Recipes that ship with FARL, one TOML file each; `farl list recipes` names them."""
