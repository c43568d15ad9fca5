/** Java client of Dragoman: tickets, token streams that resume by themselves, typed errors. */
package dev.dragoman;
