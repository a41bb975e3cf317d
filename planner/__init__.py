r"""Plan, explain and run the distributed training of transformer models.

Data flows one way, and imports with it::

    models/*.yaml   clusters/*.yaml   training.yaml   engine profile
            \            |                 |              /
             `---------- specs (frozen) = Job ----------'
                            |
     search: candidates --> layout --> cost: ledger lines --> integer program --> plan (JSON)
                                                                                   |
                                         explain, emit, launch -> torchrun -m planner.trainer plan.json
"""

__version__ = "0.1.0"
