"""What the commands share: what a person types (`parsing`, `interrupts`) and sees (`output`, `console`, `progress`)."""
