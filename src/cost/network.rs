//! What is connected to what, and how fast: machines of equal devices, one kind of link inside machines and one between.

use crate::error::{Error, Result};

/// A kind of link. All rates are bytes per second in one direction.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Link {
    /// Point-to-point rate of one port.
    pub bytes_per_s: f64,
    /// Rate that a ring all-reduce reaches on one port.
    pub collective_bytes_per_s: f64,
    /// Time a message of zero bytes takes.
    pub latency_s: f64,
}

/// One machine: some devices of one type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// How many devices it has.
    pub devices: u32,
    /// Memory of each of them, in bytes.
    pub memory_bytes: f64,
    /// Compute speed relative to the device that the profile was measured on: times divide by it.
    pub speed: f64,
}

/// Machines and the links that join them. Devices are numbered machine by machine from 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// In device order.
    pub machines: Vec<Machine>,
    /// Between the devices of one machine: each device has one port.
    pub intra: Link,
    /// Between machines: each machine has one port.
    pub inter: Link,
}

/// Seconds that some traffic takes: `bytes * s_per_byte + latency_s`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rate {
    /// Inverse bandwidth of the fullest port.
    pub s_per_byte: f64,
    /// What a message of zero bytes takes.
    pub latency_s: f64,
}

impl Cluster {
    /// Refuses what no formula below can price.
    ///
    /// # Errors
    /// [`Error::Cluster`] naming the machine or link and its number.
    pub fn check(&self) -> Result<()> {
        if self.machines.is_empty() {
            return Err(Error::cluster("the cluster has no machine", "describe at least one machine"));
        }
        for (index, machine) in self.machines.iter().enumerate() {
            if machine.devices == 0 {
                return Err(Error::cluster(format!("machine {index} has no device"), "leave it out"));
            }
            for (what, value) in [("memory", machine.memory_bytes), ("speed", machine.speed)] {
                if !(value > 0.0 && value.is_finite()) {
                    return Err(Error::cluster(
                        format!("machine {index} has a {what} of {value}"),
                        format!("{what} must be a positive number"),
                    ));
                }
            }
        }
        for (which, link) in [("inside machines", self.intra), ("between machines", self.inter)] {
            let rates = [("bandwidth", link.bytes_per_s), ("collective bandwidth", link.collective_bytes_per_s)];
            for (what, value) in rates {
                if !(value > 0.0 && value.is_finite()) {
                    return Err(Error::cluster(
                        format!("the {what} {which} is {value} bytes/s"),
                        "a bandwidth must be a positive number",
                    ));
                }
            }
            if !(link.latency_s >= 0.0 && link.latency_s.is_finite()) {
                return Err(Error::cluster(
                    format!("the latency {which} is {} s", link.latency_s),
                    "a latency must be zero or more",
                ));
            }
        }
        Ok(())
    }

    /// Devices in all machines.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.machines.iter().map(|machine| machine.devices).sum()
    }

    /// Returns how many of `devices` are on each machine that has any, ascending by machine. A device that is named twice
    /// counts once.
    #[must_use]
    pub fn footprint(&self, devices: &[u32]) -> Vec<(u32, u32)> {
        let mut sorted = devices.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let (mut sorted, mut end) = (sorted.into_iter().peekable(), 0);
        let counts = (0..).zip(&self.machines).map(|(index, machine)| {
            end += machine.devices;
            (index, std::iter::from_fn(|| sorted.next_if(|&device| device < end)).count() as u32)
        });
        counts.filter(|&(_, count)| count > 0).collect()
    }

    /// Returns the distinct machines, in the order in which they first appear, and for each machine which of them it is.
    #[must_use]
    pub fn classes(&self) -> (Vec<Machine>, Vec<usize>) {
        let mut classes: Vec<Machine> = Vec::new();
        let class_of = (self.machines.iter())
            .map(|machine| {
                classes.iter().position(|class| class == machine).unwrap_or_else(|| {
                    classes.push(*machine);
                    classes.len() - 1
                })
            })
            .collect();
        (classes, class_of)
    }

    /// How long summing `bytes` takes over a stage that has at most `widest` devices on each of `machines` machines.
    ///
    /// A ring sends `2 (n - 1) / n` of the data through each port (Patarasuk & Yuan, 2009). Across machines it is
    /// hierarchical: reduced inside each machine, summed by a ring over the machines' ports, spread inside again.
    #[must_use]
    pub fn all_reduce(&self, machines: u32, widest: u32) -> Rate {
        let ring = |members: u32, link: &Link| {
            let members = f64::from(members);
            Rate {
                s_per_byte: 2.0 * (members - 1.0) / members / link.collective_bytes_per_s,
                latency_s: 2.0 * (members - 1.0) * link.latency_s,
            }
        };
        let inside = ring(widest.max(1), &self.intra);
        let across = ring(machines.max(1), &self.inter);
        Rate { s_per_byte: inside.s_per_byte + across.s_per_byte, latency_s: inside.latency_s + across.latency_s }
    }

    /// How long a cut's bytes take from the devices of one stage to those of the next, or back.
    ///
    /// `on_machine` lists `(senders, receivers, machines)` for machines that have any: so many of each on so many
    /// machines. Every sender sends an equal part to every receiver. Inside a machine each device has a port; between machines each machine has one; ports work at
    /// once and full duplex, so the fullest decides, and both directions cost the same.
    #[must_use]
    pub fn transfer(&self, on_machine: &[(u32, u32, u32)]) -> Rate {
        let senders: u32 = on_machine.iter().map(|&(senders, _, machines)| senders * machines).sum();
        let receivers: u32 = on_machine.iter().map(|&(_, receivers, machines)| receivers * machines).sum();
        let mut inside: f64 = 0.0;
        let mut between: f64 = 0.0;
        for &(here, there, _) in on_machine {
            let sent = f64::from(here) / f64::from(senders);
            let received = f64::from(there) / f64::from(receivers);
            between = between.max(sent * (1.0 - received)).max(received * (1.0 - sent));
            if here > 0 && there > 0 {
                inside = inside.max(received / f64::from(senders)).max(sent / f64::from(receivers));
            }
        }
        Rate {
            s_per_byte: (inside / self.intra.bytes_per_s).max(between / self.inter.bytes_per_s),
            latency_s: if between > 0.0 { self.inter.latency_s } else { self.intra.latency_s },
        }
    }
}
