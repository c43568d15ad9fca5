//! The controllers of a cell, any of which answers: one is asked until it fails, then the next.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::catalogue::Reason;
use crate::channels::Address;
use crate::errors::Error;

/// Owner of which controller is asked now. Everything of one client moves on together.
#[derive(Debug)]
pub(crate) struct Controllers {
    addresses: Vec<Address>,
    current: AtomicUsize,
}

impl Controllers {
    /// `addresses`: host:port each, with commas, in the order in which they are tried.
    pub(crate) fn new(addresses: &str) -> Result<Self, Error> {
        let mut found: Vec<Address> = Vec::new();
        for part in addresses.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let address = Address::new(part, "");
            if !found.contains(&address) {
                found.push(address);
            }
        }
        if found.is_empty() {
            return Err(Error::invalid(
                "controller",
                "the address is empty; give host:port, several with commas",
            ));
        }
        Ok(Self {
            addresses: found,
            current: AtomicUsize::new(0),
        })
    }

    /// The one to ask.
    pub(crate) fn current(&self) -> &Address {
        &self.addresses[self.current.load(Ordering::Relaxed) % self.addresses.len()]
    }

    /// The answer of `call`; a controller that is away or shutting down is passed over, each one once. Fails with the error of the
    /// last.
    pub(crate) async fn ask<R, F>(&self, call: impl Fn(Address) -> F) -> Result<R, Error>
    where
        F: Future<Output = Result<R, Error>>,
    {
        for _ in 1..self.addresses.len() {
            let index = self.current.load(Ordering::Relaxed);
            match call(self.addresses[index % self.addresses.len()].clone()).await {
                Err(error) if is_away(&error) => {
                    // Late news of one that is no longer asked changes nothing.
                    let _ = self
                        .current
                        .compare_exchange(index, index + 1, Ordering::Relaxed, Ordering::Relaxed);
                }
                answer => return answer,
            }
        }
        call(self.current().clone()).await
    }
}

/// Whether another controller may do better: this one cannot be reached, or is shutting down.
fn is_away(error: &Error) -> bool {
    error.transport.is_some() || error.reason == Reason::AgentDraining
}

#[cfg(test)]
mod tests;
