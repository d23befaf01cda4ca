"""The asynchronous training loop: schedule, batches, learner step, workers, checkpoints.

Engines and tasks are passed in; nothing here imports their frameworks.
"""
