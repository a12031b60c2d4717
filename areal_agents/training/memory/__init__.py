"""The memory that training needs on each rank, known before anything is loaded."""
