"""Workers in processes of their own: how they start, talk, agree, stall and fail."""
