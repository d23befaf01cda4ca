"""Policies and samplers over concrete model libraries. Each library is imported in exactly one module."""
