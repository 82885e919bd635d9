"""What watches a federation: alerts, and tables of what is logged and alerted on."""
