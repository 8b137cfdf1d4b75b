"""Workers in processes of their own: how they start, communicate, agree, stall and fail.

Whatever waits for another worker raises `launch_join.PeerLostError` once that is gone.
"""
