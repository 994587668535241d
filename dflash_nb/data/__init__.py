"""What there is: lengths, rows, the embedded sample, and chats made into a dataset."""
