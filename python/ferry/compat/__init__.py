"""Other systems' interfaces on Ferry, for layers that were written against them."""
