"""One rank of any layout on fake tensors: its live bytes and transfers are counted, without a GPU."""
