"""A lab of real sockets: hosts that are network namespaces, links of stated bandwidth, training across them; Linux."""
