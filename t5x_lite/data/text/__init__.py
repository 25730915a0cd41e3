"""Texts of users and what is done to them: formats of files, normalization, ids, examples, metrics of predictions."""
