"""Training code of the bundled model, k2-nano: corpus, tokenizer, target, drafter, export.

Every stage is a module with a command of its own, run from the repository's root:
``python -m scripts.demo_model.STAGE --help``; ``all`` runs them one after the other.
"""
