"""The transport of packets: CAP's encoding, signatures, and the two implementations of the bus port."""
