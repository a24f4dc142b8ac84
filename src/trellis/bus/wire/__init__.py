"""How packets travel: CAP's encoding, signatures, and the two buses behind the port."""
