"""One way for every call: the catalog, the stages, the runs, the queues, the books."""
