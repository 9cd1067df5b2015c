//! What no plan is below: one file for each lemma of docs/proofs.md.

pub(crate) mod all_cuts;
pub(crate) mod bound_bisection;
pub(crate) mod cut_groups;
pub(crate) mod device_classes;
pub(crate) mod devices_at_work;
pub(crate) mod link_bounds;
pub(crate) mod memory;
pub(crate) mod nested_stages;
pub(crate) mod paths;
pub(crate) mod prefix;
pub(crate) mod relaxed_space;
#[cfg(test)]
mod tests;
