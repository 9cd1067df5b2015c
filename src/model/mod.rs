//! The model to train: a graph of layers, and the cuts at which stages may begin and end.

pub mod graph;
pub mod lineage;
pub(crate) mod order;
pub mod states;
