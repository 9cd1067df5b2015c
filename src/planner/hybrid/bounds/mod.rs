//! Lower bounds on the step of every plan. Each lemma of docs/proofs.md has one file.
//!
//! | lemma | file |
//! |---|---|
//! | Lengths of a suffix | [`paths`] |
//! | Devices at work | [`devices_at_work`] |
//! | Dominance | `dominance` |
//! | Stages in front | [`prefix`] |
//! | Devices that differ | [`device_classes`], `prefix/device_levels` |
//! | Cuts in groups | [`cut_groups`], `prefix/group_pairs`, [`nested_stages`] |
//! | Links of any placement | [`link_bounds`], [`relaxed_space`], `prefix/adjacency` |
//! | All cuts | [`all_cuts`] |
//! | Any order | [`any_order`] |
//! | Memory | [`memory`] |
//! | A pass | [`bound_bisection`] |
//!
//! `tests` checks each lemma against simulated pipelines.

pub(crate) mod all_cuts;
pub(crate) mod any_order;
pub(crate) mod bound_bisection;
pub(crate) mod cut_groups;
pub(crate) mod device_classes;
pub(crate) mod devices_at_work;
mod dominance;
pub(crate) mod link_bounds;
pub(crate) mod memory;
pub(crate) mod nested_stages;
pub(crate) mod paths;
pub(crate) mod prefix;
pub(crate) mod relaxed_space;
#[cfg(test)]
mod tests;
