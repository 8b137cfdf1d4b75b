"""Workers in processes of their own: how they start, communicate, agree, stall and fail."""
