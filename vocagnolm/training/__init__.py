"""What any Trainer needs to survive and to be watched; knows no method."""
