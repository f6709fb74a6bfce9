"""Where the rows and columns of embedding tables lie, and which bytes a step exchanges for that."""
