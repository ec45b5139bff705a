"""One optimizer step at a time: plan, schedule, optimizer, evaluation, records, assembly and the loop."""
