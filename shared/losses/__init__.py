"""What a classifier or a regression learns: losses, class weights, mixed targets, standardized targets."""
