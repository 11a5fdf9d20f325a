"""The survival and the watching of any Trainer; knows no method."""
