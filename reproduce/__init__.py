"""The papers' tables and figures, and the experiments that belong to them."""
