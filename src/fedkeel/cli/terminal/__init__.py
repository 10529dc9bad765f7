"""What the commands share: what a person types (`parsing`, `interrupts`) and what a person sees (`output`, `progress`)."""
