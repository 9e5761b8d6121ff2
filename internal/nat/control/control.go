// SPDX-License-Identifier: Apache-2.0

// Package control keeps a NAT engine equal to its rule file: it reads what a
// namespace looks like, brings an engine up, changes its rules and takes it down,
// and writes down what it changed on the machine so that it can be put back. It is
// the one package that knows both engines.
package control
