"""What watches a federation: alerts, the dashboard, and tables of what is logged and alerted on."""
